module @decode attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<1x64xf32>, %arg1: tensor<i32>, %arg2: tensor<48x4x16xf32>, %arg3: tensor<48x4x16xf32>, %arg4: tensor<64xf32>, %arg5: tensor<64x64xf32>, %arg6: tensor<64x64xf32>, %arg7: tensor<64x64xf32>, %arg8: tensor<64x64xf32>, %arg9: tensor<64xf32>, %arg10: tensor<64x160xf32>, %arg11: tensor<64x160xf32>, %arg12: tensor<160x64xf32>) -> (tensor<1x64xf32> {jax.result_info = "result[0]"}, tensor<48x4x16xf32> {jax.result_info = "result[1]"}, tensor<48x4x16xf32> {jax.result_info = "result[2]"}) {
    %0 = stablehlo.broadcast_in_dim %arg1, dims = [] : (tensor<i32>) -> tensor<1xi32>
    %1 = stablehlo.multiply %arg0, %arg0 : tensor<1x64xf32>
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %2 = stablehlo.reduce(%1 init: %cst) applies stablehlo.add across dimensions = [1] : (tensor<1x64xf32>, tensor<f32>) -> tensor<1xf32>
    %3 = stablehlo.broadcast_in_dim %2, dims = [0] : (tensor<1xf32>) -> tensor<1x1xf32>
    %cst_0 = stablehlo.constant dense<6.400000e+01> : tensor<f32>
    %4 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %5 = stablehlo.divide %3, %4 : tensor<1x1xf32>
    %cst_1 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %6 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %7 = stablehlo.add %5, %6 : tensor<1x1xf32>
    %8 = stablehlo.rsqrt %7 : tensor<1x1xf32>
    %9 = stablehlo.broadcast_in_dim %8, dims = [0, 1] : (tensor<1x1xf32>) -> tensor<1x64xf32>
    %10 = stablehlo.multiply %arg0, %9 : tensor<1x64xf32>
    %11 = stablehlo.broadcast_in_dim %arg4, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %12 = stablehlo.multiply %10, %11 : tensor<1x64xf32>
    %13 = stablehlo.dot_general %12, %arg5, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x64xf32>, tensor<64x64xf32>) -> tensor<1x64xf32>
    %14 = stablehlo.reshape %13 : (tensor<1x64xf32>) -> tensor<1x4x16xf32>
    %15 = stablehlo.iota dim = 0 : tensor<8xf32>
    %cst_2 = stablehlo.constant dense<8.000000e+00> : tensor<f32>
    %16 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %17 = stablehlo.divide %15, %16 : tensor<8xf32>
    %cst_3 = stablehlo.constant dense<1.000000e+04> : tensor<f32>
    %18 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %19 = stablehlo.power %18, %17 : tensor<8xf32>
    %cst_4 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %20 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %21 = stablehlo.divide %20, %19 : tensor<8xf32>
    %22 = stablehlo.convert %0 : (tensor<1xi32>) -> tensor<1xf32>
    %23 = stablehlo.broadcast_in_dim %22, dims = [0] : (tensor<1xf32>) -> tensor<1x1x1xf32>
    %24 = stablehlo.broadcast_in_dim %21, dims = [2] : (tensor<8xf32>) -> tensor<1x1x8xf32>
    %25 = stablehlo.broadcast_in_dim %23, dims = [0, 1, 2] : (tensor<1x1x1xf32>) -> tensor<1x1x8xf32>
    %26 = stablehlo.multiply %25, %24 : tensor<1x1x8xf32>
    %27 = stablehlo.cosine %26 : tensor<1x1x8xf32>
    %28 = stablehlo.sine %26 : tensor<1x1x8xf32>
    %29 = stablehlo.slice %14 [0:1, 0:4, 0:8] : (tensor<1x4x16xf32>) -> tensor<1x4x8xf32>
    %30 = stablehlo.slice %14 [0:1, 0:4, 8:16] : (tensor<1x4x16xf32>) -> tensor<1x4x8xf32>
    %31 = stablehlo.broadcast_in_dim %27, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<1x4x8xf32>
    %32 = stablehlo.multiply %29, %31 : tensor<1x4x8xf32>
    %33 = stablehlo.broadcast_in_dim %28, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<1x4x8xf32>
    %34 = stablehlo.multiply %30, %33 : tensor<1x4x8xf32>
    %35 = stablehlo.subtract %32, %34 : tensor<1x4x8xf32>
    %36 = stablehlo.broadcast_in_dim %27, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<1x4x8xf32>
    %37 = stablehlo.multiply %30, %36 : tensor<1x4x8xf32>
    %38 = stablehlo.broadcast_in_dim %28, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<1x4x8xf32>
    %39 = stablehlo.multiply %29, %38 : tensor<1x4x8xf32>
    %40 = stablehlo.add %37, %39 : tensor<1x4x8xf32>
    %41 = stablehlo.concatenate %35, %40, dim = 2 : (tensor<1x4x8xf32>, tensor<1x4x8xf32>) -> tensor<1x4x16xf32>
    %42 = stablehlo.dot_general %12, %arg6, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x64xf32>, tensor<64x64xf32>) -> tensor<1x64xf32>
    %43 = stablehlo.reshape %42 : (tensor<1x64xf32>) -> tensor<1x4x16xf32>
    %44 = stablehlo.iota dim = 0 : tensor<8xf32>
    %cst_5 = stablehlo.constant dense<8.000000e+00> : tensor<f32>
    %45 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %46 = stablehlo.divide %44, %45 : tensor<8xf32>
    %cst_6 = stablehlo.constant dense<1.000000e+04> : tensor<f32>
    %47 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %48 = stablehlo.power %47, %46 : tensor<8xf32>
    %cst_7 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %49 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %50 = stablehlo.divide %49, %48 : tensor<8xf32>
    %51 = stablehlo.convert %0 : (tensor<1xi32>) -> tensor<1xf32>
    %52 = stablehlo.broadcast_in_dim %51, dims = [0] : (tensor<1xf32>) -> tensor<1x1x1xf32>
    %53 = stablehlo.broadcast_in_dim %50, dims = [2] : (tensor<8xf32>) -> tensor<1x1x8xf32>
    %54 = stablehlo.broadcast_in_dim %52, dims = [0, 1, 2] : (tensor<1x1x1xf32>) -> tensor<1x1x8xf32>
    %55 = stablehlo.multiply %54, %53 : tensor<1x1x8xf32>
    %56 = stablehlo.cosine %55 : tensor<1x1x8xf32>
    %57 = stablehlo.sine %55 : tensor<1x1x8xf32>
    %58 = stablehlo.slice %43 [0:1, 0:4, 0:8] : (tensor<1x4x16xf32>) -> tensor<1x4x8xf32>
    %59 = stablehlo.slice %43 [0:1, 0:4, 8:16] : (tensor<1x4x16xf32>) -> tensor<1x4x8xf32>
    %60 = stablehlo.broadcast_in_dim %56, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<1x4x8xf32>
    %61 = stablehlo.multiply %58, %60 : tensor<1x4x8xf32>
    %62 = stablehlo.broadcast_in_dim %57, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<1x4x8xf32>
    %63 = stablehlo.multiply %59, %62 : tensor<1x4x8xf32>
    %64 = stablehlo.subtract %61, %63 : tensor<1x4x8xf32>
    %65 = stablehlo.broadcast_in_dim %56, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<1x4x8xf32>
    %66 = stablehlo.multiply %59, %65 : tensor<1x4x8xf32>
    %67 = stablehlo.broadcast_in_dim %57, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<1x4x8xf32>
    %68 = stablehlo.multiply %58, %67 : tensor<1x4x8xf32>
    %69 = stablehlo.add %66, %68 : tensor<1x4x8xf32>
    %70 = stablehlo.concatenate %64, %69, dim = 2 : (tensor<1x4x8xf32>, tensor<1x4x8xf32>) -> tensor<1x4x16xf32>
    %71 = stablehlo.dot_general %12, %arg7, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x64xf32>, tensor<64x64xf32>) -> tensor<1x64xf32>
    %72 = stablehlo.reshape %71 : (tensor<1x64xf32>) -> tensor<1x4x16xf32>
    %c = stablehlo.constant dense<0> : tensor<i32>
    %73 = stablehlo.compare LT, %arg1, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_8 = stablehlo.constant dense<48> : tensor<i32>
    %74 = stablehlo.add %arg1, %c_8 : tensor<i32>
    %75 = stablehlo.select %73, %74, %arg1 : tensor<i1>, tensor<i32>
    %c_9 = stablehlo.constant dense<0> : tensor<i32>
    %c_10 = stablehlo.constant dense<0> : tensor<i32>
    %76 = stablehlo.compare LT, %c_9, %c_10, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_11 = stablehlo.constant dense<0> : tensor<i32>
    %c_12 = stablehlo.constant dense<4> : tensor<i32>
    %77 = stablehlo.add %c_11, %c_12 : tensor<i32>
    %c_13 = stablehlo.constant dense<0> : tensor<i32>
    %78 = stablehlo.select %76, %77, %c_13 : tensor<i1>, tensor<i32>
    %c_14 = stablehlo.constant dense<0> : tensor<i32>
    %c_15 = stablehlo.constant dense<0> : tensor<i32>
    %79 = stablehlo.compare LT, %c_14, %c_15, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_16 = stablehlo.constant dense<0> : tensor<i32>
    %c_17 = stablehlo.constant dense<16> : tensor<i32>
    %80 = stablehlo.add %c_16, %c_17 : tensor<i32>
    %c_18 = stablehlo.constant dense<0> : tensor<i32>
    %81 = stablehlo.select %79, %80, %c_18 : tensor<i1>, tensor<i32>
    %82 = stablehlo.dynamic_update_slice %arg2, %70, %75, %78, %81 : (tensor<48x4x16xf32>, tensor<1x4x16xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<48x4x16xf32>
    %c_19 = stablehlo.constant dense<0> : tensor<i32>
    %83 = stablehlo.compare LT, %arg1, %c_19, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_20 = stablehlo.constant dense<48> : tensor<i32>
    %84 = stablehlo.add %arg1, %c_20 : tensor<i32>
    %85 = stablehlo.select %83, %84, %arg1 : tensor<i1>, tensor<i32>
    %c_21 = stablehlo.constant dense<0> : tensor<i32>
    %c_22 = stablehlo.constant dense<0> : tensor<i32>
    %86 = stablehlo.compare LT, %c_21, %c_22, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_23 = stablehlo.constant dense<0> : tensor<i32>
    %c_24 = stablehlo.constant dense<4> : tensor<i32>
    %87 = stablehlo.add %c_23, %c_24 : tensor<i32>
    %c_25 = stablehlo.constant dense<0> : tensor<i32>
    %88 = stablehlo.select %86, %87, %c_25 : tensor<i1>, tensor<i32>
    %c_26 = stablehlo.constant dense<0> : tensor<i32>
    %c_27 = stablehlo.constant dense<0> : tensor<i32>
    %89 = stablehlo.compare LT, %c_26, %c_27, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_28 = stablehlo.constant dense<0> : tensor<i32>
    %c_29 = stablehlo.constant dense<16> : tensor<i32>
    %90 = stablehlo.add %c_28, %c_29 : tensor<i32>
    %c_30 = stablehlo.constant dense<0> : tensor<i32>
    %91 = stablehlo.select %89, %90, %c_30 : tensor<i1>, tensor<i32>
    %92 = stablehlo.dynamic_update_slice %arg3, %72, %85, %88, %91 : (tensor<48x4x16xf32>, tensor<1x4x16xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<48x4x16xf32>
    %93 = stablehlo.dot_general %41, %82, batching_dims = [1] x [1], contracting_dims = [2] x [2], precision = [HIGHEST, HIGHEST] : (tensor<1x4x16xf32>, tensor<48x4x16xf32>) -> tensor<4x1x48xf32>
    %cst_31 = stablehlo.constant dense<4.000000e+00> : tensor<f32>
    %94 = stablehlo.broadcast_in_dim %cst_31, dims = [] : (tensor<f32>) -> tensor<4x1x48xf32>
    %95 = stablehlo.divide %93, %94 : tensor<4x1x48xf32>
    %96 = stablehlo.iota dim = 0 : tensor<48xi32>
    %97 = stablehlo.broadcast_in_dim %96, dims = [1] : (tensor<48xi32>) -> tensor<1x48xi32>
    %98 = stablehlo.broadcast_in_dim %0, dims = [0] : (tensor<1xi32>) -> tensor<1x1xi32>
    %99 = stablehlo.broadcast_in_dim %98, dims = [0, 1] : (tensor<1x1xi32>) -> tensor<1x48xi32>
    %100 = stablehlo.compare LE, %97, %99, SIGNED : (tensor<1x48xi32>, tensor<1x48xi32>) -> tensor<1x48xi1>
    %101 = stablehlo.broadcast_in_dim %100, dims = [1, 2] : (tensor<1x48xi1>) -> tensor<1x1x48xi1>
    %cst_32 = stablehlo.constant dense<-1.000000e+09> : tensor<f32>
    %102 = call @_where(%101, %95, %cst_32) : (tensor<1x1x48xi1>, tensor<4x1x48xf32>, tensor<f32>) -> tensor<4x1x48xf32>
    %cst_33 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %103 = stablehlo.reduce(%102 init: %cst_33) applies stablehlo.maximum across dimensions = [2] : (tensor<4x1x48xf32>, tensor<f32>) -> tensor<4x1xf32>
    %cst_34 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %104 = stablehlo.broadcast_in_dim %cst_34, dims = [] : (tensor<f32>) -> tensor<4x1xf32>
    %105 = stablehlo.maximum %104, %103 : tensor<4x1xf32>
    %106 = stablehlo.broadcast_in_dim %105, dims = [0, 1] : (tensor<4x1xf32>) -> tensor<4x1x1xf32>
    %107 = stablehlo.broadcast_in_dim %106, dims = [0, 1, 2] : (tensor<4x1x1xf32>) -> tensor<4x1x48xf32>
    %108 = stablehlo.subtract %102, %107 : tensor<4x1x48xf32>
    %109 = stablehlo.exponential %108 : tensor<4x1x48xf32>
    %cst_35 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %110 = stablehlo.reduce(%109 init: %cst_35) applies stablehlo.add across dimensions = [2] : (tensor<4x1x48xf32>, tensor<f32>) -> tensor<4x1xf32>
    %111 = stablehlo.broadcast_in_dim %110, dims = [0, 1] : (tensor<4x1xf32>) -> tensor<4x1x1xf32>
    %112 = stablehlo.broadcast_in_dim %111, dims = [0, 1, 2] : (tensor<4x1x1xf32>) -> tensor<4x1x48xf32>
    %113 = stablehlo.divide %109, %112 : tensor<4x1x48xf32>
    %114 = stablehlo.dot_general %92, %113, batching_dims = [1] x [0], contracting_dims = [0] x [2], precision = [HIGHEST, HIGHEST] : (tensor<48x4x16xf32>, tensor<4x1x48xf32>) -> tensor<4x16x1xf32>
    %115 = stablehlo.transpose %114, dims = [2, 0, 1] : (tensor<4x16x1xf32>) -> tensor<1x4x16xf32>
    %116 = stablehlo.reshape %115 : (tensor<1x4x16xf32>) -> tensor<1x64xf32>
    %117 = stablehlo.dot_general %116, %arg8, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x64xf32>, tensor<64x64xf32>) -> tensor<1x64xf32>
    %118 = stablehlo.add %arg0, %117 : tensor<1x64xf32>
    %119 = stablehlo.multiply %118, %118 : tensor<1x64xf32>
    %cst_36 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %120 = stablehlo.reduce(%119 init: %cst_36) applies stablehlo.add across dimensions = [1] : (tensor<1x64xf32>, tensor<f32>) -> tensor<1xf32>
    %121 = stablehlo.broadcast_in_dim %120, dims = [0] : (tensor<1xf32>) -> tensor<1x1xf32>
    %cst_37 = stablehlo.constant dense<6.400000e+01> : tensor<f32>
    %122 = stablehlo.broadcast_in_dim %cst_37, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %123 = stablehlo.divide %121, %122 : tensor<1x1xf32>
    %cst_38 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %124 = stablehlo.broadcast_in_dim %cst_38, dims = [] : (tensor<f32>) -> tensor<1x1xf32>
    %125 = stablehlo.add %123, %124 : tensor<1x1xf32>
    %126 = stablehlo.rsqrt %125 : tensor<1x1xf32>
    %127 = stablehlo.broadcast_in_dim %126, dims = [0, 1] : (tensor<1x1xf32>) -> tensor<1x64xf32>
    %128 = stablehlo.multiply %118, %127 : tensor<1x64xf32>
    %129 = stablehlo.broadcast_in_dim %arg9, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %130 = stablehlo.multiply %128, %129 : tensor<1x64xf32>
    %131 = stablehlo.dot_general %130, %arg10, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x64xf32>, tensor<64x160xf32>) -> tensor<1x160xf32>
    %132 = call @silu(%131) : (tensor<1x160xf32>) -> tensor<1x160xf32>
    %133 = stablehlo.dot_general %130, %arg11, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x64xf32>, tensor<64x160xf32>) -> tensor<1x160xf32>
    %134 = stablehlo.multiply %132, %133 : tensor<1x160xf32>
    %135 = stablehlo.dot_general %134, %arg12, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x160xf32>, tensor<160x64xf32>) -> tensor<1x64xf32>
    %136 = stablehlo.add %118, %135 : tensor<1x64xf32>
    return %136, %82, %92 : tensor<1x64xf32>, tensor<48x4x16xf32>, tensor<48x4x16xf32>
  }
  func.func private @_where(%arg0: tensor<1x1x48xi1>, %arg1: tensor<4x1x48xf32>, %arg2: tensor<f32>) -> tensor<4x1x48xf32> {
    %0 = stablehlo.broadcast_in_dim %arg0, dims = [0, 1, 2] : (tensor<1x1x48xi1>) -> tensor<4x1x48xi1>
    %1 = stablehlo.broadcast_in_dim %arg2, dims = [] : (tensor<f32>) -> tensor<4x1x48xf32>
    %2 = stablehlo.select %0, %arg1, %1 : tensor<4x1x48xi1>, tensor<4x1x48xf32>
    return %2 : tensor<4x1x48xf32>
  }
  func.func private @silu(%arg0: tensor<1x160xf32>) -> tensor<1x160xf32> {
    %0 = stablehlo.negate %arg0 : tensor<1x160xf32>
    %1 = stablehlo.exponential %0 : tensor<1x160xf32>
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %2 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<1x160xf32>
    %3 = stablehlo.add %2, %1 : tensor<1x160xf32>
    %cst_0 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %4 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<1x160xf32>
    %5 = stablehlo.divide %4, %3 : tensor<1x160xf32>
    %6 = stablehlo.multiply %arg0, %5 : tensor<1x160xf32>
    return %6 : tensor<1x160xf32>
  }
}
